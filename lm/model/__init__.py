"""Tokens to logits, and the accounting of what that costs."""
