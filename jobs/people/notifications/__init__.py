"""What jobs tell of themselves to others: webhooks and mails, written with the change and sent apart from it."""
