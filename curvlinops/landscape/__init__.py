"""Looks at losses and layers by products with operators. Nothing below imports this room."""
