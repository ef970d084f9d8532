"""The healthy spread of the numerics question: measured on many sound arms, and made into its limits."""
