"""What holds of any request and answer: who asks and how often, what an address may ask, how one is refused."""
