"""Pages fetched before they are asked for."""
