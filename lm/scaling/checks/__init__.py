"""What a fit is worth: identifiability, influence, hold-out, coverage."""
