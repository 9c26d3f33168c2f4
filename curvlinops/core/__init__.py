"""What all operators share. Knows no loss and no layer."""
