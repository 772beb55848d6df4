-- KEYS: 1 state hash, 2 log-probabilities. No ARGV.
return {'OK', redis.call('GET', KEYS[2]) or ''}
