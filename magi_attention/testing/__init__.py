"""What tests and the self-test share: rank processes, tolerances. Never imported by the library's own path."""
