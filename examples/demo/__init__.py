"""Long-context training demo: documents of a folder, packed, context parallel. Started by examples/run_demo.py."""
