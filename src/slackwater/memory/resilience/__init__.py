"""How a page is spread over lenders, and made whole again."""
