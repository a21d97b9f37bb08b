"""C for the processor: built with the package where there is a compiler, and done without where there is none."""
