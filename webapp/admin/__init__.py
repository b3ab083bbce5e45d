"""What of the admin is ours beside its pages (`jobs/admin/`): its colours, and what it answers to nonsense."""
