"""`kvferry plan`: what a model needs of a card, by arithmetic alone."""
