"""Plans that are there already are looked after: checked, compared, written anew."""
