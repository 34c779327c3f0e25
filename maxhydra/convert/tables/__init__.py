"""One module per family of weights, each with a TABLE. A new family is a new file here and its sizes in conf/model."""
