"""The pages: thin views, their forms and lists."""
