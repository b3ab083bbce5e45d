"""The pages of jobs: their list, one of them, several side by side."""
