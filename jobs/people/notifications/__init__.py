"""Webhooks and emails about jobs, queued with each change and sent by the controller."""
