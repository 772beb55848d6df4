-- KEYS: 1 state hash, 2 log-probabilities. ARGV: session TTL ms, fence, offset in bytes, records.
local refused = refusal(ARGV[2])
if refused then
  return refused
end
redis.call('SETRANGE', KEYS[2], tonumber(ARGV[3]), ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[1])
return {'OK'}
