"""The check-up: static rules over training code here in the light half; machine, recipe and live checks beside them."""
