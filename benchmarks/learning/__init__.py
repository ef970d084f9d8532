"""At which rate a model's bfloat16 weights move and its loss falls steadily; measured on a GPU."""
