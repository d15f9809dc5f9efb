"""The harness: scenarios in, verdicts out - and diagnosis of any program that talks through torch.distributed."""
