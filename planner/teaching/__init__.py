"""Where figures come from and how they grow, for a reader; and layouts that were published."""
