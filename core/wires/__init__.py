"""Wire formats: fewer bits than float32 on the network, and the reducer that sends them."""
