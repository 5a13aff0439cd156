"""The backend of torch.distributed: process groups whose calls are checked before data moves."""
