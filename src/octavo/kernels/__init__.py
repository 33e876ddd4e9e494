"""What computes: `reference` says what each op is, the other files say it faster, `dispatch` chooses."""
