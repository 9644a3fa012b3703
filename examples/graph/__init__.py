"""GCNs whose nodes are spread over ranks, trained with one neighbour sampler after another."""
