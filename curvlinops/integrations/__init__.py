"""Problems from models of other packages, none of which is imported."""
