"""The command `accordion-hvd plan`: what each configuration would cost on a cluster."""
