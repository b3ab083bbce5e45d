"""Search layouts, choose one, and compare it with similar layouts."""
