"""Model, loss and data, and facts about them."""
