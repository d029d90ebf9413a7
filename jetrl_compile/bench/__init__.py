"""What `jetrl bench` measures: kernels, layers, decoder stacks and gradients.

Everything that is compared is measured in one run, in turns (A B C A B C ...), on
random data, after a warm-up of its own; medians are compared. Times of different runs
are not: clocks, drivers and neighbours change.
"""
