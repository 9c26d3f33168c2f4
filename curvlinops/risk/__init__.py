"""Model, loss and data, and what is known of them."""
