"""The pages: views, forms, and lists."""
