"""What crosses the network in fewer bits than float32."""
