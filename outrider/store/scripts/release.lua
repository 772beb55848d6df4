-- ARGV: session TTL ms, fence. The number stays, so that the next owner's is larger.
local refused = refusal(ARGV[2])
if refused then
  return refused
end
redis.call('HSET', KEYS[1], 'lease.owner', '', 'lease.expires_ms', '0')
refresh(ARGV[1])
return {'OK'}
