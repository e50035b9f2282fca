"""Where the time of a running pipeline goes: threads, stacks, channels, GPUs, and what they add up to."""
