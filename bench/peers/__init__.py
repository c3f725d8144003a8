"""Other packages' methods, which bench.time_to_loss runs next to this project's."""
