"""The GPU scheduler: views, policies and decisions. Pure."""
