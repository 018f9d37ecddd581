"""The tape: every request, step and model pass, recorded off the decode path and read back."""
