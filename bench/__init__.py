"""Speed measurements, and the emulated cluster that they run on."""
