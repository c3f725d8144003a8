"""L-GreCo: the compression of each layer, chosen while training."""
