"""L-GreCo: each layer its own compression, chosen anew while training. After the abstract and the released code."""
