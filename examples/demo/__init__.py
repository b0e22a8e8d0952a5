"""Long-context training demo: documents of a folder, packed, context parallel. Started by examples/05_train_long_context.py."""
