"""Documents in, micro-batches out: formats, store, packing, anchors, reader."""
