-- ARGV: session TTL ms, fence, lease ms. A released lease has no owner and cannot be renewed.
local refused = refusal(ARGV[2])
if refused then
  return refused
end
local owner = redis.call('HGET', KEYS[1], 'lease.owner')
if owner == '' then
  return {'FENCED', tonumber(ARGV[2])}
end
local reply = grant(owner, ARGV[2], ARGV[3])
reply[4] = owner
refresh(ARGV[1])
return reply
