"""Values that training and sampling are made of."""
