"""Problems from models of other packages, and callbacks for their training loops."""
