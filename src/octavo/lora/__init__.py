"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685): files of PEFT to tensors in slots of a rank's layers."""
