"""Format of times in the admin pages: 22 Nov 2026 03:04 UTC."""

DATETIME_FORMAT = "j M Y H:i T"
