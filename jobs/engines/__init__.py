"""Who runs a job: an engine places, starts, observes and cancels attempts."""
