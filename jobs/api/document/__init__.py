"""The OpenAPI document, and what it may no longer take back."""
