"""The bus: request-reply and facts between services. See `base.Bus`."""
