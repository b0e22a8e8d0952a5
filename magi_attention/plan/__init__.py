"""From a mask to what every rank does: dispatch, exchanges, steps. Pure CPU planning; never imports torch, comm or kernels."""
