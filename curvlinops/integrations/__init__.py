"""Problems from models of other packages, and callbacks for their training loops."""

from curvlinops.integrations import transformers as transformers
